"""`python -m fusedit`: the same as the `fusedit` command."""

from fusedit.cli import main

main()
