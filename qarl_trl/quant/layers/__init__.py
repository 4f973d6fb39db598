"""What a module of a model becomes: layers that ask the store for their weight and multiply by it."""
