"""Everything is in pyproject.toml but this: one C file, built where there is a compiler, done without elsewhere."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "packsvc._native",
            sources=["packsvc/_native.c"],
            extra_compile_args=["-O3"],
            py_limited_api=True,
            optional=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
