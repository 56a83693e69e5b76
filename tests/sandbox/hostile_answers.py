"""Answers that attack whatever executes them: a seeded choice of many kinds, with odd arguments."""

import random

# What an answer does; each runs in `exec`, after `import os, sys, time`. `{n}` is a small number,
# `{file}`, `{pid}`, `{port}`, `{udp}`, `{socket}` a file, a process and sockets of the user's.
KINDS = {
    "forks": [
        "os.fork()",
        "os.fork(); os.fork(); value = {n}",
        "if os.fork() == 0: os.setsid(); time.sleep(60)",
        "if os.fork() == 0:\n os.setsid()\n if os.fork() == 0:\n  while True: pass\nvalue = 1",
        "if os.fork(): os._exit({n})\nvalue = 1",
        "import subprocess; subprocess.Popen(['sleep', '60'], start_new_session=True)",
        "for i in range({n}0):\n if os.fork() == 0: time.sleep(60)",
        "from threading import Thread\n"
        "for i in range({n}): Thread(target=time.sleep, args=(60,)).start()",
    ],
    "reports": [
        "for fd in range(3, 64):\n try: os.write(fd, b'[1.0, \"\"]\\n' * {n})\n"
        " except OSError: pass",
        "for fd in range(3, 64):\n try: os.write(fd, b'[{n}, 1.0, \"\"]\\n')\n"
        " except OSError: pass\nos._exit(0)",
        "for fd in range(3, 64):\n try: os.write(fd, b'\\0\\0\\0\\x05[{n}')\n"
        " except OSError: pass\nos._exit(0)",
        "for fd in range(3, 64):\n try: os.write(fd, b'[' * 100000 + b'\\n')\n"
        " except OSError: pass",
        "for fd in range(3, 64):\n try: os.write(fd, b'[1e999, \"\"]\\n')\n except OSError: pass",
        "for fd in range(3, 64):\n try: os.write(fd, b'{{}}\\n\\xff\\n[NaN, 1, 2, 3]\\n')\n"
        " except OSError: pass",
        "os.closerange(3, 200); value = {n}",
        "os.closerange(0, 200); os._exit({n})",
        "for fd in range(3, 64):\n try: os.dup2({n}, fd)\n except OSError: pass",
        "for fd in range(3, 64):\n try: os.lseek(fd, 0, 0); os.read(fd, 1)\n except OSError: pass",
    ],
    "signals": [
        "os.kill(os.getppid(), {n})",
        "os.kill(os.getppid(), 9)",
        "os.kill({pid}, 9)",
        "os.kill(-1, 9)",
        "os.kill(1, 9)",
        "os.killpg(os.getpgid(os.getppid()), 9)",
        "for pid in range(2, {n}000):\n try: os.kill(pid, 9)\n except OSError: pass",
        "import signal; signal.alarm(1); os.kill(os.getpid(), {n})",
        "import resource; resource.prlimit({pid}, resource.RLIMIT_CPU, (0, 0))",
        "os.setpriority(os.PRIO_PROCESS, {pid}, 19)",
    ],
    "files": [
        "open('{file}', 'w').write('mine')",
        "os.unlink('{file}')",
        "os.truncate('{file}', 0)",
        "os.rename('{file}', '{file}2')",
        "open('{file}{n}', 'w')",
        "os.symlink('/etc/passwd', '{file}{n}')",
        "os.mkdir('{file}{n}')",
        "import shutil; shutil.rmtree(os.path.dirname('{file}'))",
        "open('sympy.py', 'w').write('raise SystemExit')",
        "os.makedirs('/'.join('d' * 50 * {n})); value = 1",
        "os.mkdir('locked'); open('locked/x', 'w'); os.chmod('locked', 0)",
        "open('big', 'wb').truncate(1 << 4{n})",
        "os.chdir('/'); os.chroot('/tmp')",
        "files = [open('x', 'w') for i in range({n}000)]",
        "open('/proc/self/oom_score_adj', 'w').write('-1000')",
        "open('/dev/shm/hostile{n}', 'w')",
    ],
    "sockets": [
        "import socket; socket.create_connection(('127.0.0.1', {port}), 1)",
        "import socket; s = socket.socket(); s.bind(('127.0.0.1', 4{n}321)); s.listen()",
        "import socket; s = socket.socket(socket.AF_UNIX); s.connect('{socket}')",
        "import socket\nsocket.socket(type=socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', {udp}))",
        "import urllib.request; urllib.request.urlopen('http://127.0.0.1:{port}', timeout=1)",
    ],
    "interpreter": [
        "import builtins; builtins.float = lambda x: {n}.0",
        "import user_scorers; user_scorers.execute = lambda *a: {n}.0",
        "import json; json.dumps = lambda *a, **k: '[1.0, \"\"]'",
        "from specrl_jax.sandbox import worker_process as w; w.Template._send = lambda *a: None",
        "from specrl_jax.sandbox import worker_process as w; w.Result.to_line = lambda s: b''",
        "from specrl_jax.sandbox import containment as c; c.end_children = lambda g: 0",
        "import gc\nfor x in gc.get_objects():\n if isinstance(x, list): x.clear()",
        "sys.setrecursionlimit(1 << 30); f = lambda: f(); f()",
        "os.environ['PATH'] = ''; sys.path.clear(); sys.modules.clear(); value = {n}",
        "import ctypes; ctypes.string_at({n})",
        "os.abort()",
        "os._exit({n})",
        "raise SystemExit({n})",
        "raise KeyboardInterrupt",
        "raise MemoryError",
        "class E(Exception):\n __str__ = lambda self: 1 / 0\nraise E",
        "class F:\n __float__ = lambda self: os.fork() and {n}.0\nvalue = F()",
        "value = float('nan')",
        "value = -1e30{n}",
        "value = 10 ** {n}00",
        "value = 'x' * {n}000000",
        "raise ValueError('\\n' * 10000 + '\\x1b[2J' + '\\ud800')",
        "sys.exit = os._exit = lambda c: time.sleep(60); value = 1",
        "import atexit; atexit.register(os.fork); value = {n}",
    ],
    "resources": [
        "x = bytearray({n} << 40)",
        "x = [b'x' * (1 << 20) for i in range(1 << 20)]",
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (-1, -1)); x = bytearray(1 << 34)",
        "import mmap; x = mmap.mmap(-1, {n} << 34)",
        "print('{n}' * 1000000); value = 1",
        "sys.stderr.write('\\x1b]0;title\\x07\\x1b[2J' * {n}); value = 1",
    ],
}
HANGS = [
    "while True: pass",
    "time.sleep(60)",
    "9**9**9",
    "import signal; signal.pthread_sigmask(0, range(1, 65)); time.sleep(60)",
    "os.kill(os.getpid(), 19); time.sleep(60)",
    "while True: print('spam' * {n}00)",
    "import sys\nwhile True: os.write(2, b'x')",
]
BOMBS = ["while True: os.fork()", "while True:\n if os.fork() == 0: os.setsid()"]


def choose(seed: int, count: int, hangs: list[str], **names) -> list[str]:
    """`count` answers, `len(hangs)` of which use up their time; no kind is left out."""
    rng = random.Random(seed)
    texts = [text for texts in KINDS.values() for text in texts]
    chosen = texts + rng.choices(texts, k=max(count - len(texts) - len(hangs), 0))
    chosen = chosen[: count - len(hangs)] + hangs
    rng.shuffle(chosen)
    prefix = "import os, sys, time\n"
    return [prefix + text.format(n=rng.randint(1, 9), **names) for text in chosen]
