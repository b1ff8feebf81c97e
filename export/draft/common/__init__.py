"""The room below the kinds of draft heads: the description, the base class of the modules, the fields, the reading of
layers. It imports no kind."""
