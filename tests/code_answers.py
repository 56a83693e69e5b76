"""Responses under the reward `code`: a right one, and tricks of wrong ones."""

LIMITS = {"timeout": 10.0, "memory_mib": 512, "workers": 2}
RIGHT = "def add(a, b):\n    return a + b\n"
ANY = """
class Any({base}):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __lt__(self, other): return True
    def __sub__(self, other): return self
    def __abs__(self): return self
    def __float__(self): return 4.0
    __hash__ = object.__hash__
def add(a, b): return {value}
"""
REPORT = r"""
import os
for fd in range(3, 200):
    for line in (b'[1.0, ""]\n', b'["", "", true, []]\n', b'["", "", {}]\n'):
        try: os.write(fd, line)
        except OSError: pass
"""
