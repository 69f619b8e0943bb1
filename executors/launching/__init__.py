"""The processes that ranks are: who starts them, how they find each other and tell how far they are."""
