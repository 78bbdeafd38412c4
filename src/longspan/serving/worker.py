"""The one thread that runs the model: it steps a pool while there is work."""

import threading
import time

from .pool import Pool, Stream


class Worker:
    """Runs ``pool.step`` in a thread until ``close``.

    An error of a step ends all streams with the reason ``error``; the thread goes on. Streams never wait for a thread
    that has ended: they end with an error.
    """

    def __init__(self, pool: Pool):
        self.pool = pool
        self.turned = time.monotonic()
        """when the thread last went round"""
        self.cancelled = 0
        """streams cancelled so far"""
        self._wake = threading.Event()
        self._closing = self._ended = False
        self._thread = threading.Thread(target=self._loop, name="longspan-serving", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Let the thread look for new streams."""
        self._wake.set()

    def cancel(self, stream: Stream, *, count: bool = True) -> None:
        """End a stream before the next step; ``count=False`` for an end that its client expects, as a stop string."""
        if stream.finished is None and not stream.cancelled:
            self.cancelled += count
            self.pool.cancel(stream)
            self.wake()

    @property
    def running(self) -> bool:
        """Whether the thread has not ended."""
        return self._thread.is_alive() and not self._ended

    @property
    def alive(self) -> bool:
        """Whether the thread went round within the last 5 seconds."""
        return self.running and time.monotonic() - self.turned < 5

    def close(self) -> None:
        """Stop the thread after the current step."""
        self._closing = True
        self.wake()
        self._thread.join(10)

    def _loop(self) -> None:
        reason = "the server is shutting down"
        try:
            self._turns()
        except BaseException as error:
            reason = f"the model's thread has ended: {type(error).__name__}: {error}"
            raise
        finally:
            self._ended = True
            self.pool.fail(reason)

    def _turns(self) -> None:
        while not self._closing:
            self.turned = time.monotonic()
            if self.pool.idle:
                self._wake.wait(1.0)
                self._wake.clear()
                continue
            try:
                self.pool.step()
            except Exception as error:
                self.pool.fail(f"{type(error).__name__}: {error}")
