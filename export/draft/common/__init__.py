"""The code that all kinds of draft heads share: the description, the base class of the modules, the fields, the reading
of layers. It imports no kind."""
