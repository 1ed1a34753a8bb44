"""One function per subcommand of `fastrl`: its signature is its options, its docstring their help."""
