"""How is found what the user meant? The nearest vectors, and the pipeline that turns them into hits."""
