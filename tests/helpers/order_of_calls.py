"""A stand-in for CUDA graphs where there is no GPU."""


class OrderOfCalls:
    """Stands for a ``torch.cuda.CUDAGraph``: it runs at the capture what it is to capture, and again at each replay,
    whose outputs lie where those of the capture lay."""

    def __init__(self):
        self.calls: list[str] = []

    def capture(self, body, _device):
        self.calls.append("capture")
        body()
        self._body = body
        return self

    def replay(self):
        self.calls.append("replay")
        graphed = self._body.__self__
        captured = graphed._outputs
        self._body()
        for kept, made in zip(captured, graphed._outputs, strict=True):
            kept.copy_(made)
        graphed._outputs = captured

    def reset(self):
        self.calls.append("reset")
