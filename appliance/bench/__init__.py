"""`appliance bench`: what chats and camera frames wait for each other, measured at the client."""
