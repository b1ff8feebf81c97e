"""The C++ that methods have in common is compiled once, and each library has all of it."""

import ctypes
import subprocess

import pytest
from torch._inductor.cpp_builder import BuildOptionsBase, CppBuilder

from eagle3.export.lowering.cuda.inductor import interface
from eagle3.export.lowering.cuda.inductor.interface import interface_once

INTERFACE = """#include <cstdio>  // model_container.h
template <class T> struct Box { T get() { return 7; } };
extern "C" {
int common() { return Box<int>().get(); }
} // extern "C"
"""


@pytest.fixture
def built(tmp_path, monkeypatch):
    """A function that compiles a method's C++ as Inductor does, and returns its library."""
    monkeypatch.setattr(interface, "cache_dir", lambda: str(tmp_path / "cache"))
    monkeypatch.setattr(interface, "BASE", "template struct Box<int>;\n")

    def build(name: str, text: str) -> ctypes.CDLL:
        source = tmp_path / f"{name}.wrapper.cpp"
        source.write_text(text)
        options = BuildOptionsBase(compiler="g++", definitions=["A=35"], cflags=["fPIC"], compile_only=True)
        CppBuilder(f"{name}.wrapper", str(source), options, str(tmp_path)).build()
        assert sorted(file.name for file in tmp_path.glob(f"{name}*")) == [f"{name}.wrapper.cpp", f"{name}.wrapper.o"]
        library = tmp_path / f"{name}.so"
        subprocess.run(["g++", "-shared", tmp_path / f"{name}.wrapper.o", "-o", library], check=True)
        return ctypes.CDLL(str(library))

    return build


def test_methods_share_one_object_and_each_library_has_both_parts(built, tmp_path):
    with interface_once():
        for name, added in (("first", 1), ("second", 2)):
            library = built(name, f'{INTERFACE}extern "C" int own() {{ return A + {added} + Box<int>().get(); }}\n')
            assert (library.common(), library.own()) == (7, 42 + added)
    assert len(list((tmp_path / "cache").rglob("*.o"))) == 1


def test_other_text_is_compiled_as_a_whole(built, tmp_path):
    with interface_once():
        assert built("other", INTERFACE.replace("model_container.h", "")).common() == 7
    assert not (tmp_path / "cache").exists()
