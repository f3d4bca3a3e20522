"""What the training scripts of the embedded models share: data, captions, model sizes, the optimizer and the loop."""
