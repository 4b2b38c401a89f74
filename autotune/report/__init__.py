"""What is reported of records and kernels: accounts, tables, figures, files for C and C++."""
