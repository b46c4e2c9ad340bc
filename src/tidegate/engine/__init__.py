"""The loop that turns plans into tokens: plan -> execute -> apply."""
