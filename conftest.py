pytest_plugins = ["veriformer.plugin"]
