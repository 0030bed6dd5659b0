"""The studio: training runs, new jobs, a queue and chats in the browser, served by one process."""
