"""How fast the operators are: times, shares of ceilings measured in the same run, ratios to a torch formulation."""
