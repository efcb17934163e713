"""The decoder's building blocks, flat over tokens; they know neither sequences nor blocks nor files."""
