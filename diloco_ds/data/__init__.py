"""Text to training examples: sources, tokenizer, packing into blocks, and which island reads which block."""
