"""`python -m benchmarks`: the benchmark of saving and loading."""

from benchmarks.save_load import main

if __name__ == "__main__":
    main()
