"""Op: one piece of arithmetic, its implementations, and the decorator that registers a file of ops/."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Generic, NamedTuple, ParamSpec, TypeVar, cast

import torch

from fusedit.errors import FuseditError, OpError
from fusedit.ops import _library, _outputs, _triton
from fusedit.ops._build import Build
from fusedit.ops._cases import Case
from fusedit.ops._outputs import Dtypes, Results, empty
from fusedit.ops._signature import Signature
from fusedit.ops._values import negated, resolved, widest

P = ParamSpec("P")
R = TypeVar("R")
Tensor = torch.Tensor

SLACK: Final = 1e-6
EXACTNESS: Final = ("bitwise", "reordered", "lossy")
"""`bitwise`: the same bits as stock; `reordered`: the same mathematics, other rounding; `lossy`: approximates."""


class Cost(NamedTuple):
    """What one call moves through device memory and computes, at the least."""

    bytes: int
    flops: int


class Backend(NamedTuple):
    """The implementation that serves a call, and why no faster one does (empty when the first choice serves)."""

    name: str
    reason: str


class Op(Generic[P, R]):
    """One op: callable like the function it was made of, with every implementation and its description beside it.

    Attributes:
        name: the name of the file and of the function.
        exactness: one of EXACTNESS, against the stock formulation.
        summary: first line of the file's docstring.
        reference: plain torch in fp32 (fp64 for fp64 inputs), the definition of right; of a result in e4m3 the values
            before rounding.
        cost: same arguments as the op (meta tensors will do) -> Cost.
        cases: the shapes that tests, benchmarks and tuning share.
        slack: for each result, how far it may be off beside the 2x rule (see `_verify`).
        ran: how often each backend served a call in this process.
    """

    def __init__(
        self,
        launch: Callable[P, R],
        *,
        summary: str,
        exactness: str,
        reference: Callable[..., Any],
        plain: Callable[..., Any],
        check: Callable[..., tuple[Sequence[int], ...]],
        cost: Callable[..., Cost],
        cases: Sequence[Case],
        builds: Callable[[], Sequence[Build]],
        backend: Callable[..., Backend] | None,
        limit: Callable[..., str] | None,
        reads: Callable[..., tuple[Tensor, ...]] | None,
        fits: Callable[[Tensor], bool],
        allocate: Callable[..., Tensor],
        dtypes: Dtypes | Callable[..., Dtypes] | None,
        slack: tuple[float, ...] | None,
        mixed: bool,
        one_place: bool,
    ) -> None:
        if exactness not in EXACTNESS:
            raise ValueError(f"exactness {exactness!r} is none of {', '.join(EXACTNESS)}")
        if dtypes is not None and not mixed:
            raise ValueError(
                "an op that names the dtypes of its results must be mixed: its plain chooses in what to work"
            )
        self.name = launch.__name__
        self.summary = summary
        self.exactness = exactness
        self.reference = reference
        self.cost = cost
        self.cases = tuple(cases)
        self.ran: Counter[str] = Counter()
        self.__doc__ = launch.__doc__
        self.__name__ = launch.__name__
        self.__wrapped__ = launch
        self._launch = launch
        self._plain = plain
        self._check = check
        self._builds = builds
        self._choose = backend
        self._limit = limit
        self._reads = reads
        self._fits = fits
        self._mixed = mixed
        self.one_place = one_place
        self._signature = Signature(launch)
        self._first, self._outputs = self._signature.first, self._signature.outputs
        self._results = Results(self._outputs, allocate, dtypes)
        self.slack = (SLACK,) * self._outputs if slack is None else slack
        self._functional, self._mutating = _library.register(self._signature, self._guarded, check, self._results)

    def __repr__(self) -> str:
        return f"<op {self.name}: {self.summary}>"

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        # The dispatcher costs about 15 us a call: only tracers and tensor subclasses, which must see one node, take it.
        traced = torch.compiler.is_compiling() or _dispatch_stack() > 0
        if traced or (args and type(args[0]) not in _ORDINARY and isinstance(args[0], Tensor)):
            return self._traced(args, dict(kwargs))  # type: ignore[no-any-return]
        return self._guarded(args, kwargs, kwargs.pop("out", None))  # type: ignore[no-any-return]

    def plain(self, *args: Any, out: Any = None, **kwargs: Any) -> R:
        """Plain torch in the input's dtype, whatever the device; arguments and `out` are checked as for the op."""
        try:
            self._settle(args, kwargs, out)
        except Exception as error:
            self._explain(error, args, kwargs, out)
            raise
        return self.unchecked(*args, out=out, **kwargs)

    def unchecked(self, *args: Any, out: Any = None, **kwargs: Any) -> R:
        """`plain` for callers that know their arguments to be right, as models do: on a CPU, and where a plan
        switches the rewrite off. Wrong arguments are explained where they fail; some give wrong values instead."""
        try:
            if not self._mixed:
                x: Tensor = self._lead(args, kwargs)
                dtype = x.dtype
                for t in args:
                    if isinstance(t, Tensor) and t.dtype is not dtype and t.is_floating_point():
                        return cast(R, self._plain_mixed(dtype, args, kwargs, out))
                for t in kwargs.values():
                    if isinstance(t, Tensor) and t.dtype is not dtype and t.is_floating_point():
                        return cast(R, self._plain_mixed(dtype, args, kwargs, out))
            return self._plain(*args, out=out, **kwargs)  # type: ignore[no-any-return]
        except Exception as error:
            self._explain(error, args, kwargs, out)
            raise

    def direct(self, *args: Any, **kwargs: Any) -> R:
        """The op for callers that know their arguments to be right, the first of them a positional tensor: `unchecked`
        on a CPU, where the op would check them and do the same, 30 to 100 us a call, a tenth of a small step."""
        return self.unchecked(*args, **kwargs) if args[0].is_cpu else self(*args, **kwargs)

    def backend(self, *args: Any, **kwargs: Any) -> Backend:
        """Which implementation would serve this call, and why no faster one does."""
        try:
            if kwargs or len(args) > len(self._signature.kinds):  # what a check may pass over
                self._signature.judge(args, kwargs)
            self._check(*args, **kwargs)
            return self._backend(args, kwargs)
        except Exception as error:
            self._explain(error, args, kwargs)
            raise

    def dtypes(self, *args: Any, **kwargs: Any) -> tuple[torch.dtype, ...]:
        """Dtypes of the results of a call with these arguments, which are taken to be right."""
        return self._results.dtypes(self._lead(args, kwargs), args, kwargs)

    def builds(self) -> tuple[Build, ...]:
        """Every kernel variant that the models' sizes need, for compilation ahead of time; empty without triton."""
        return tuple(self._builds()) if _triton.status()[0] else ()

    # -- how a call runs ---------------------------------------------------------------------------------------------

    def _lead(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return args[0] if args else kwargs[self._first]

    def _explain(self, error: Exception, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any = None) -> None:
        """Raises OpError where a call failed for its arguments.

        Asked only then, so that calls which succeed do not pay for arguments that almost nobody gives.
        """
        if isinstance(error, FuseditError | torch.OutOfMemoryError):
            return
        self._signature.judge(args, kwargs)
        shapes = self._check(*args, **kwargs)
        if torch.is_grad_enabled():
            self._refuse_grad((*args, *kwargs.values()))
        if out is not None:
            self._accept(out, shapes, self._lead(args, kwargs), args, kwargs)

    def _guarded(self, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> Any:
        try:
            return self._run(args, kwargs, out)
        except Exception as error:
            self._explain(error, args, kwargs, out)
            raise

    def _backend(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Backend:
        if self._choose is not None:
            return self._choose(*args, **kwargs)
        x = self._lead(args, kwargs)
        usable, reason = _triton.status(x.device, x.dtype)
        if usable and x.dtype is torch.float64:
            usable, reason = False, "no kernels for float64"
        if usable and self._limit is not None:
            reason = self._limit(*args, **kwargs)
            usable = not reason
        return Backend("triton", "") if usable else Backend("plain", reason)

    def _settle(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
    ) -> tuple[Tensor, Sequence[Sequence[int]], Sequence[Tensor] | None]:
        """Checks a call; returns its first argument, the shapes of its results, and `out` as a tuple."""
        shapes = self._check(*args, **kwargs)
        if torch.is_grad_enabled():
            self._refuse_grad((*args, *kwargs.values()))
        x: Tensor = self._lead(args, kwargs)
        return x, shapes, None if out is None else self._accept(out, shapes, x, args, kwargs)

    def _run(self, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> Any:
        x, shapes, outs = self._settle(args, kwargs, out)
        if negated(args) or (kwargs and negated(kwargs.values())):
            args, kwargs = resolved(args), {name: resolved(value) for name, value in kwargs.items()}
        if all(0 in shape for shape in shapes):
            return out if out is not None else self._results.pack(self._results.all(x, shapes, args, kwargs))
        if self._choose is not None:
            return self._on_device(x, args, kwargs, out)
        backend = _ON_CPU if x.is_cpu and not _triton.INTERPRETING else self._backend(args, kwargs)
        self.ran[backend.name] += 1
        if backend.name == "plain":
            result = self.unchecked(*args, **kwargs, out=out)
            return out if out is not None else self._results.as_allocated(result)
        if outs is None:
            outs = self._results.all(x, shapes, args, kwargs)
        direct = [t if self._fits(t) else self._results.one(x, t.shape, t.dtype) for t in outs]
        self._on_device(x, args, kwargs, self._results.pack(direct))
        for target, made in zip(outs, direct, strict=True):
            if target is not made:
                target.copy_(made)
        return out if out is not None else self._results.pack(outs)

    def _on_device(self, x: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Any:
        launch = cast(Callable[..., Any], self._launch)
        if x.is_cuda and x.device.index != torch.cuda.current_device():
            with torch.cuda.device(x.device):
                return launch(*args, **kwargs, out=out)
        return launch(*args, **kwargs, out=out)

    def _traced(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        out = kwargs.pop("out", None)
        if torch.is_grad_enabled():
            self._refuse_grad((*args, *kwargs.values()))
        if torch.compiler.is_compiling():
            return self._dispatched(args, kwargs, out)
        try:
            return self._dispatched(args, kwargs, out)
        except Exception as error:
            self._explain(error, args, kwargs, out)
            raise

    def _dispatched(self, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> Any:
        if out is None:
            return self._functional(*args, **kwargs)
        outs = self._signature.outs(out)
        self._mutating(*args, **kwargs, **{f"out_{place}": t for place, t in enumerate(outs)})
        return out

    def _plain_mixed(self, dtype: torch.dtype, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Any:
        """Weights kept in another dtype than the activations: compute in the widest of all and fp32, round once."""
        widened = widest((*args, *kwargs.values()))

        def widen(t: Any) -> Any:
            return t.to(widened) if isinstance(t, Tensor) and t.is_floating_point() else t

        made = self._plain(*map(widen, args), out=None, **{key: widen(value) for key, value in kwargs.items()})
        made = [made] if self._outputs == 1 else list(made)
        if out is None:
            return self._results.pack([t.to(dtype) for t in made])
        for target, t in zip([out] if self._outputs == 1 else out, made, strict=True):
            target.copy_(t)
        return out

    def _refuse_grad(self, values: Sequence[Any]) -> None:
        for value in values:
            if isinstance(value, Tensor):
                wanted = value.requires_grad
            else:
                listed = isinstance(value, list | tuple)
                wanted = listed and any(isinstance(t, Tensor) and t.requires_grad for t in value)
            if wanted:
                raise OpError(f"{self.name} has no gradient: call it under torch.no_grad(), or use the stock module")

    def _accept(
        self, out: Any, shapes: Sequence[Sequence[int]], x: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Tensor, ...]:
        outs = self._signature.outs(out)
        if self._reads is not None:
            inputs = self._reads(*args, **kwargs)
        else:
            inputs = tuple(t for t in (*args, *kwargs.values()) if isinstance(t, Tensor))

        def named(t: Tensor) -> str:
            return self._signature.name_of(t, args, kwargs)

        kept, in_order = self._results.dtypes(x, args, kwargs), self._reads is not None
        _outputs.check(self.name, outs, shapes, kept, x, inputs, named, in_order=in_order, one_place=self.one_place)
        return outs


_ORDINARY: Final = (Tensor, torch.nn.Parameter)
_dispatch_stack: Final = torch._C._len_torch_dispatch_stack
_ON_CPU: Final = Backend("plain", "no kernels for device type cpu")


def _rows_fit(t: Tensor) -> bool:
    return t.stride(-1) == 1 or t.shape[-1] == 1


def op(
    *,
    exactness: str,
    reference: Callable[..., Any],
    plain: Callable[..., Any],
    check: Callable[..., tuple[Sequence[int], ...]],
    cost: Callable[..., Cost],
    cases: Sequence[Case],
    builds: Callable[[], Sequence[Build]] = tuple,
    backend: Callable[..., Backend] | None = None,
    limit: Callable[..., str] | None = None,
    reads: Callable[..., tuple[Tensor, ...]] | None = None,
    fits: Callable[[Tensor], bool] = _rows_fit,
    allocate: Callable[..., Tensor] = empty,
    dtypes: Dtypes | Callable[..., Dtypes] | None = None,
    slack: tuple[float, ...] | None = None,
    mixed: bool = False,
    one_place: bool = False,
) -> Callable[[Callable[P, R]], Op[P, R]]:
    """Turns the launcher of a file of ops/ into its Op and registers `fusedit::name` and `fusedit::name_out`.

    The launcher gets checked arguments and an `out` that is always there, non-empty and laid out as `fits` asks.

    Args:
        check: same arguments -> shapes of the results; raises OpError.
        plain: same arguments and `out` (may be None) -> the results; may assume one dtype unless `mixed`.
        builds: kernel variants to compile ahead of time.
        backend: says which library kernel serves a call; the launcher then runs it on any device, counts it in `ran`,
            and gets `out` as the caller gave it, None too. Default: the Triton kernel where it can run, else plain.
        limit: same arguments -> why the kernel cannot take them, or "".
        reads: same arguments -> the views that are read, the i-th of which the i-th output may lie on exactly;
            default: every tensor argument, and any output may lie exactly on any of them.
        fits: whether the kernel can write into a tensor as it lies; if not, it writes a temporary that is copied.
        allocate: (first argument, shape) -> an empty result in the dtype of the first argument.
        dtypes: of each result, None for that of the first argument, which is the default for all; or a function of the
            op's arguments that gives them. Goes with `mixed`.
        slack: for each result, how far it may be off beside the 2x rule, as a part of the largest value; of what is
            rounded to e4m3, how far the value before rounding may be off, as a part of 448. Default: 1e-6.
        mixed: plain takes tensors of several dtypes itself.
        one_place: as `out` one tensor may be given for all results, which then holds the last.
    """

    def wrap(launch: Callable[P, R]) -> Op[P, R]:
        summary = (inspect.getdoc(inspect.getmodule(launch)) or "").splitlines()
        return Op(
            launch,
            summary=summary[0] if summary else "",
            exactness=exactness,
            reference=reference,
            plain=plain,
            check=check,
            cost=cost,
            cases=cases,
            builds=builds,
            backend=backend,
            limit=limit,
            reads=reads,
            fits=fits,
            allocate=allocate,
            dtypes=dtypes,
            slack=slack,
            mixed=mixed,
            one_place=one_place,
        )

    return wrap
