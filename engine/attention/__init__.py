"""How queries meet the paged keys and values; it knows neither models nor requests."""
