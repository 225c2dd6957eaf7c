"""Base class of objects with `close`, usable in a `with` block."""

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self


class Closable(ABC):
    """Has a lifetime that ends with `close`, or at the end of its `with` block."""

    @abstractmethod
    def close(self) -> None:
        """Release all resources. A second call does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
