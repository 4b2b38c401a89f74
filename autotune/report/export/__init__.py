"""Turns stored winners into what C and C++ use: CUDA files with a launch function, a header, machine code."""

from autotune.report.export.files import Export, cubin_files, cuda_file, header_file, to_export

__all__ = ["Export", "cubin_files", "cuda_file", "header_file", "to_export"]
