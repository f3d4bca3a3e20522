"""Linear layers in e4m3: the layer, its products, the conversion of a model and back, and checkpoints of it."""
