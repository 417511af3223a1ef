# Copies the file FROM to TO, a place in the Python package: modules that lie beside each other elsewhere are parts of it there.
file(READ "${FROM}" text)
string(REPLACE "from shardwright_plan import" "from .shardwright_plan import" text "${text}")
string(REPLACE "from model_export" "from .model_export" text "${text}")
string(REPLACE "sys.path.insert(0, str(HERE))\n" "" text "${text}")
file(WRITE "${TO}" "${text}")
