"""What every part uses and no model: records of runs, options of commands, files, tables, figures."""
