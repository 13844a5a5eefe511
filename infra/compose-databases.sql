-- Runs when PostgreSQL starts with an empty volume. POSTGRES_DB has made the database prefect; these two are MLflow's.
create database mlflow owner dphybrid;
create database mlflow_auth owner dphybrid;
