"""What every part uses: options of commands, recipes, architectures by name, the console, tables, safe loading."""
