"""All knowledge of model families: one adapter each, behind one protocol."""

from vlm_engine.models.base import (
    ImageInput,
    ImageRows,
    ModelSpec,
    PreparedPrompt,
    PromptPreparer,
    VisionLanguageModel,
)
from vlm_engine.models.loading import FAMILIES, load_model, load_prompts

__all__ = [
    "FAMILIES",
    "ImageInput",
    "ImageRows",
    "ModelSpec",
    "PreparedPrompt",
    "PromptPreparer",
    "VisionLanguageModel",
    "load_model",
    "load_prompts",
]
