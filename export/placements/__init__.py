"""Where Q/DQ goes, per engine: rules as data. One engine a file."""
