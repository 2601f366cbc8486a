"""One line of progress with the time that is left."""

import sys
import time


class Progress:
    def __init__(self, label, total):
        self.label, self.total, self.started, self.shown = label, total, time.monotonic(), 0.0

    def show(self, done, note=""):
        """Redraw at most once a second on a terminal, every half minute elsewhere."""
        now = time.monotonic()
        if now - self.shown < (1 if sys.stderr.isatty() else 30):
            return
        self.shown = now
        share = min(1.0, done / self.total)
        left = (now - self.started) * (1 - share) / max(share, 1e-9)
        bar = "#" * int(share * 24)
        end = "\r" if sys.stderr.isatty() else "\n"
        print(f"{self.label} [{bar:<24}] {share:4.0%}, {left / 60:5.1f} min left {note}", end=end, file=sys.stderr, flush=True)

    def close(self):
        if sys.stderr.isatty():
            print(file=sys.stderr)
