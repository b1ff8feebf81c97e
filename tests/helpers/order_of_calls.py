"""A stand-in for CUDA graphs on a machine without a GPU."""


class OrderOfCalls:
    """Stands for a ``torch.cuda.CUDAGraph``: it runs the captured function at the capture and again at each replay,
    which writes its outputs to the tensors of the capture."""

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
