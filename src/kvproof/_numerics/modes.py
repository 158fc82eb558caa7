"""Two modes entered as one: one sees operations, the other the torch functions that they are part of."""

from typing import Any, Self

from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


class PairedMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that enters and leaves a function mode with itself."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.functions: TorchFunctionMode  #: the function mode, which a subclass sets

    def __enter__(self) -> Self:
        super().__enter__()  # type: ignore[no-untyped-call]
        self.functions.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        self.functions.__exit__(*exception)  # type: ignore[no-untyped-call]
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
