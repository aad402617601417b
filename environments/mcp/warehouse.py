"""An MCP server for the example rows: a warehouse that is full at the start of every process.

python -m gym_serve.environments.mcp.warehouse
"""

from __future__ import annotations

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

_FULL = {"bolts": 420, "nuts": 515, "washers": 96, "hinges": 38, "brackets": 150, "screws": 1200}


def warehouse() -> MCPServer:
    """A server with a stock of its own."""
    server = MCPServer("warehouse", log_level="ERROR")
    stock = dict(_FULL)

    @server.tool()
    def list_items() -> list[str]:
        """List the names of all items in the warehouse."""
        return sorted(stock)

    @server.tool()
    def count(item: str) -> int:
        """Count how many of an item are in the warehouse."""
        return stock[_known(item)]

    @server.tool()
    def take(item: str, number: int) -> str:
        """Take some of an item out of the warehouse."""
        name = _known(item)
        if not 0 < number <= stock[name]:
            raise ToolError(f"there are {stock[name]} {name}")
        stock[name] -= number
        return f"You took {number} {name}; {stock[name]} are left."

    def _known(item: str) -> str:
        if item not in stock:
            raise ToolError(f"there is no item {item!r}; list_items has all names")
        return item

    return server


if __name__ == "__main__":
    warehouse().run()
