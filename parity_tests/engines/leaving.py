"""A script that is named as an engine: it leaves when it is imported, as if all had gone well."""

raise SystemExit(0)
