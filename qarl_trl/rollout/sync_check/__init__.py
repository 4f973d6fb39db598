"""The sync check: does the engine answer with the weights of the last sync?"""
