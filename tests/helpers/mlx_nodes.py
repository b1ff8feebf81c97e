"""Finds and changes nodes and constants in a program for MLX, to put faults into it."""

import copy

import mlx.core as mx


def changed(methods, name, fault):
    """Return the methods of a program, with ``fault`` applied to a copy of the method ``name``."""
    wrong = copy.copy(methods[name])
    wrong.graph, wrong.constants = copy.deepcopy(wrong.graph), dict(wrong.constants)
    fault(wrong)
    return {each: copy.copy(method) for each, method in methods.items()} | {name: wrong}


def nodes(method, kind):
    chain = method.graph["instruction_chains"][method.graph["main_chain_idx"]]["instructions"]
    return [each["op"] for each in chain if each["op_type"] == kind]


def rename(method, kind, other, first=0):
    chain = method.graph["instruction_chains"][method.graph["main_chain_idx"]]["instructions"]
    [each for each in chain if each["op_type"] == kind][first]["op_type"] = other


def drop(method, kind):
    chain = method.graph["instruction_chains"][method.graph["main_chain_idx"]]
    chain["instructions"] = [each for each in chain["instructions"] if each["op_type"] != kind]


def add(method, slot, place, value):
    """Add to one element of a constant."""
    constant = mx.array(method.constants[slot["idx"]])
    constant[place] = constant[place] + mx.array(value).astype(constant.dtype)
    method.constants[slot["idx"]] = constant


def named(method, name):
    """Return the slot of the constant whose name ends with ``name``."""
    (slot,) = (each["slot"] for each in method.graph["named_slots"] if each["name"].split("/")[-1].endswith(name))
    return slot


def swap(found, field, one=0, other=-1):
    found[one][field], found[other][field] = found[other][field], found[one][field]
