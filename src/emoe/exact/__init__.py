"""Laws of small models by enumeration, and checks of methods against them."""
