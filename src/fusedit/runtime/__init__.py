"""What models and ops stand on: packed weights, values hoisted out of the step, and where a forward is replaced."""
