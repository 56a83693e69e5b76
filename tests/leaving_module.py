"""A module that ends whoever imports it."""

import sys

sys.exit(3)
