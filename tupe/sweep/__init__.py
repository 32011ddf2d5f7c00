"""Many runs, and what came out of them: jobs, sweeps, tables, the report."""
