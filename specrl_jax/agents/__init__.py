"""Episodes of several turns: environments, their processes, tools and tasksets."""
