"""Models: building them, their initial weights, the loss over a large vocabulary, Hugging Face export."""
