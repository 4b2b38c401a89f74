"""What is told of records and kernels: tables, figures, files for C++."""
