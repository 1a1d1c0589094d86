"""What went wrong, to keep or to send: bisection, bundles, a second opinion."""
