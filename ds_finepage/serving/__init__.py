"""An OpenAI-compatible endpoint for one attached model: transformers' own serving stack."""
