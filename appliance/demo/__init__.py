"""How the bundled demo models are made: data, training, evaluation. Not needed to run the appliance."""
