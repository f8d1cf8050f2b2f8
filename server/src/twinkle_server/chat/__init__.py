"""The chat endpoints: OpenAI's API below `/v1`, and Anthropic's at `/v1/messages`."""
