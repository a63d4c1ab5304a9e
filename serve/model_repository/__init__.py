"""The served models: how they are opened, replaced and found."""
