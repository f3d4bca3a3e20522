"""What is kept from one call to the next, and how it is known that nothing it depends on has changed.

checksum.py reads the content of weights, watch.py tells whether an encoder is still what it was, store.py holds a
bounded number of results, views.py puts them in the place of an encoder's run, prompts.py lays it all on a pipeline.
"""
