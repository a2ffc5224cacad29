"""Other systems' strategies are priced here under the same prices."""
