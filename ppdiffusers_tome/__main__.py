import gc
import sys

from .cli import main

gc.freeze()  # what is imported stays, so that a collection for each program that is written or loaded takes no time
sys.exit(main())
