create database mlflow owner dphybrid;
create database mlflow_auth owner dphybrid;
